"""Blocks in a bucket of an S3 service, shared by many daemons."""

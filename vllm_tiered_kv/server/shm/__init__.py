"""The daemon's memory in the hands of processes on the same host: attaching and leases."""

"""Decisions about blocks: indexes, slots, transfer plans, and ledgers. It moves no bytes."""

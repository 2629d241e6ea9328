"""Decisions about blocks: slots, index, plans. No bytes are moved here."""

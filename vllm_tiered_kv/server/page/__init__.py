"""The status page: its history, the recent problems, and the facts that it shows."""

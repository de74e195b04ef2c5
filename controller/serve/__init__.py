"""The running controller: sessions, tables, leases, configuration and what it keeps on disk."""

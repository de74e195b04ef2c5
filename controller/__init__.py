"""The sidecar and its command line: receive, log, learn, decide, push."""

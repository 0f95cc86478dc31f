"""The dashboard: one page over HTTP that shows what the daemon holds and does."""

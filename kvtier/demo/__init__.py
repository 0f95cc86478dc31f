"""`make demo`: one real model with and without kvtier, side by side, through a kill -9 of the daemon."""

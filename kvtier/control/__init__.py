"""The verbs of kvtierctl, loaded when they are called."""

"""Request traces replayed through the real store with tiny payloads and a clock of their own."""

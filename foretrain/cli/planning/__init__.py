"""What `plan` and `advise` share: their options, exact answers, limits, and how they print."""

"""Whether a training layout fits a card, and what it should yield: arithmetic on a configuration, without weights."""

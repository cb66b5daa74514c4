"""What the families share: launches, their compilation and timing, the choice of tilings, facts about GPUs."""

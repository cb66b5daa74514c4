"""Shared by the families: launches, their compilation and timing, the choice of tilings, facts about GPUs."""

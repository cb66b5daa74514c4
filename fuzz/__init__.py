"""Fuzzers: hostile plans, made by the million, of which none may crash, hang, escape or compute wrongly.

    python -m fuzz.decoder --seconds 3600 --seed 1      # damaged bytes, through decoder and rules
    python -m fuzz.plans --seconds 3600 --seed 1        # damaged CPU plans, through to a run
    python -m fuzz.operators --seconds 3600 --seed 1    # single nodes of every operator, through to a run
    python -m fuzz.corpus fuzz/corpus/*.plan            # run kept files again

A case follows from the seed and its number alone. What is found is written to the folder ``--corpus``
and ends the campaign with status 1; files worth keeping go to fuzz/corpus, which a test replays.
"""

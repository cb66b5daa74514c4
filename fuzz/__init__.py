"""Fuzzers: hostile plans, of which none may crash, hang, escape or compute wrongly; and models to compile.

    python -m fuzz.decoder --seconds 3600 --seed 1      # damaged bytes: decoder and rules
    python -m fuzz.plans --seconds 3600 --seed 1        # damaged CPU plans: up to a run
    python -m fuzz.operators --seconds 3600 --seed 1    # single nodes of every operator: up to a run
    python -m fuzz.rewrites --seconds 3600 --seed 1     # models that an optimiser rewrites: plans against ONNX Runtime
    python -m fuzz.corpus fuzz/corpus/*.plan            # kept files

A case is determined by the seed and its number. A finding is written to the folder ``--corpus`` and ends the campaign
with status 1; files worth keeping go to fuzz/corpus, which a test replays.
"""

"""Comparisons of runs, from their folders alone: ``python -m llm.compare RUNS_OR_FOLDERS --out report/``.

folders -> discover -> records     what a run folder says, whatever its age or state; torch is not needed
records -> groups                  runs alike but for their seeds; which of several learning rates counts
groups  -> fairness, analysis      what differs that should not; means, intervals, paired differences
analysis -> tables, figures        as data; then as text, HTML and images
figures -> page, images, writing   the report folder
follow                             a live view of runs under way
"""

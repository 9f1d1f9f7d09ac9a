"""The torture matrix: ordinary training jobs, bare and under Stepscope, which must behave the same (``make gpu``)."""

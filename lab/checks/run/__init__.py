"""The run of the judge: cases in worker processes, unsupported and equivalent calls, verdicts, known failures."""

"""Run the judge: worker processes that judge cases, refused calls and their equivalent forms, verdicts, and known failures."""

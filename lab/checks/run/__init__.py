"""The judge's run: worker processes that judge cases, equivalent calls for refused ones, the audit, and known failures."""

"""One self-contained HTML page of a folder of recorded results: `python -m lab.reports.html FOLDER`. Needs the extra `html`."""

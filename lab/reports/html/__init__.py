"""Write one self-contained HTML page about a folder of recorded results (`lab html FOLDER`). Needs the extra `html`."""

"""Questions put to the hardware, one module each: `python -m lab.experiments.<name>`."""

"""Pictures of recorded studies, one module per study, and those of the notebooks."""

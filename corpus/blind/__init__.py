"""590 wrong kernels by writers who knew only the documented calls and had not seen the judge."""

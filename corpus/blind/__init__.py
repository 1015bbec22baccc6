"""590 wrong kernels, written from the documented calls alone by writers who had not seen the judge."""

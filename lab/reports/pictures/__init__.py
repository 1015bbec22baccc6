"""Pictures of mechanisms, for notebooks and documents, and the style of all the lab's pictures. Needs the extra `plots`."""

"""Pictures of recorded times, and the style that all the lab's pictures share. Needs the extra `plots`."""

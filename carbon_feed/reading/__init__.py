"""Reading: a zone's loop from its provider to the reading in force, by the zone's leader."""

"""Everything between kvrelay's values and the wire: servers, channels, errors, deadlines, conversions."""

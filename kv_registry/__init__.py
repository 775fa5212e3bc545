"""The registry: membership, block directory and booked load of the fleet, kept in Redis. Holds nothing itself."""

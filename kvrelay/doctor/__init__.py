"""What is wrong with this machine or this fleet, and what to do: checks that judge, fed by probes that look."""

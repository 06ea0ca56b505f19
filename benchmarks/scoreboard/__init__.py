"""How well the parity check finds and names what is wrong: planted faults, right ports, mutants of the project."""

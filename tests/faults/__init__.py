"""A lab that breaks small real runs in one way each, by a seed, and looks whether they end or recover as promised."""

"""What a call launches: stages, grids, workspaces and tensor maps. Pure arithmetic, no GPU."""

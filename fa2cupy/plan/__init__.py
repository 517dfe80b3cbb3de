"""Plans of calls: stages, grids, workspaces and tensor maps. Planning is arithmetic on the host and needs no GPU."""

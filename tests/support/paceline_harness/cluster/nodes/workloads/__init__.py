"""Stand-ins for the controllers of a control plane, one short file each."""

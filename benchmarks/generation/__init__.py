"""Jobs on simulated engines with a simulated trainer, and what each mode reaches at best."""

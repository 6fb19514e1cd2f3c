"""Runs workloads as pods: a Deployment for each rollout pool of a job, a Job for its trainer."""

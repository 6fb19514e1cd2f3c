"""An installation in one process whose services and workers can be killed at any moment.

Services, clients, store and cluster API are real. Of the workers, what computes is left out.
"""

"""Adds the servicers of this service to its server."""

from __future__ import annotations

from grpc import aio

from paceline.v1.access_pb2_grpc import (
    add_AccessServicer_to_server,
    add_AuthenticationServicer_to_server,
)
from paceline.v1.experience_pb2_grpc import add_ExperienceServicer_to_server
from paceline.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import add_RosterServicer_to_server
from paceline.v1.tenants_pb2_grpc import add_TenantsServicer_to_server
from paceline_experience.api.access import AccessServicer, AuthenticationServicer
from paceline_experience.api.experience import ExperienceServicer
from paceline_experience.api.jobs import JobsServicer
from paceline_experience.api.roster import RosterServicer
from paceline_experience.api.tenants import TenantsServicer


def add_servicers(
    server: aio.Server,
    *,
    jobs: JobsServicer,
    experience: ExperienceServicer,
    roster: RosterServicer,
    access: AccessServicer,
    authentication: AuthenticationServicer,
    tenants: TenantsServicer,
) -> None:
    """Let a server answer for all of them."""
    add_JobsServicer_to_server(jobs, server)
    add_ExperienceServicer_to_server(experience, server)
    add_RosterServicer_to_server(roster, server)
    add_AccessServicer_to_server(access, server)
    add_AuthenticationServicer_to_server(authentication, server)
    add_TenantsServicer_to_server(tenants, server)

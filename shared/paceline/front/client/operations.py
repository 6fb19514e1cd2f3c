"""A method for each operation of the REST API. Made by dev/operations.py."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.quota import Quota
from paceline.front.api.documents import (
    ActivityView,
    AuditLogPage,
    EpisodePage,
    ImportView,
    JobDeletion,
    JobPage,
    JobView,
    MetricPage,
    ModelFile,
    TenantPage,
    TenantView,
    TokenMade,
    TokenPage,
    TokenView,
    TrajectoryPage,
    VerificationView,
    WeightsView,
)
from paceline.front.client.calls import RestCall, View


class Operations:
    """Calls of `Client`."""

    def send(self, request: RestCall[View]) -> View:
        """Send one call."""
        raise NotImplementedError

    def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Cancel a job; its record is kept."""
        return self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/cancel", JobView, params={"reason": reason})
        )

    def create_token(
        self,
        name: str,
        *,
        tenant: str = "",
        role: str = "",
        expires_in_s: float | None = None,
        no_code: bool | None = None,
    ) -> TokenMade:
        """Create a token; only this reply contains it."""
        return self.send(
            RestCall(
                "POST",
                "/v1/tokens",
                TokenMade,
                body={
                    "name": name,
                    "tenant": tenant,
                    "role": role,
                    "expires_in_s": expires_in_s,
                    "no_code": no_code,
                },
            )
        )

    def delete(self, job_id: str, *, force: bool | None = None) -> JobDeletion:
        """Delete a job with its checkpoints and files; audit log and usage are kept."""
        return self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/delete", JobDeletion, params={"force": force})
        )

    def get_activity(self, *, tenant: str = "") -> ActivityView:
        """What jobs and processes are doing and waiting for, as cumulative seconds."""
        return self.send(RestCall("GET", "/v1/activity", ActivityView, params={"tenant": tenant}))

    def get(self, job_id: str) -> JobView:
        """Get a job."""
        return self.send(RestCall("GET", f"/v1/jobs/{job_id}", JobView))

    def get_model_file(self, job_id: str, name: str) -> ModelFile:
        """Get a small file of a job's model, such as `tokenizer.json`."""
        return self.send(RestCall("GET", f"/v1/jobs/{job_id}/model/{name}", ModelFile))

    def import_episodes(self, job_id: str, *, lines: str = "") -> ImportView:
        """Store trajectories that were collected elsewhere in the replay of a job."""
        return self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/replay", ImportView, body={"lines": lines})
        )

    def list_audit(
        self, *, before: str = "", page_size: int | None = None, tenant: str = "", action: str = ""
    ) -> AuditLogPage:
        """List audit entries, newest first."""
        return self.send(
            RestCall(
                "GET",
                "/v1/audit-log",
                AuditLogPage,
                params={
                    "before": before,
                    "page_size": page_size,
                    "tenant": tenant,
                    "action": action,
                },
            )
        )

    def list_episodes(
        self,
        job_id: str,
        *,
        page_size: int | None = None,
        page_token: str = "",
        purpose: str = "",
        group_id: str = "",
        task_id: str = "",
        reward: str = "",
        step: str = "",
        age: str = "",
        status: str = "",
        failed: bool | None = None,
        dropped: bool | None = None,
        trajectories: bool | None = None,
    ) -> EpisodePage:
        """List stored episodes by reward, step, age, task, group or failure, newest first."""
        return self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/episodes",
                EpisodePage,
                params={
                    "page_size": page_size,
                    "page_token": page_token,
                    "purpose": purpose,
                    "group_id": group_id,
                    "task_id": task_id,
                    "reward": reward,
                    "step": step,
                    "age": age,
                    "status": status,
                    "failed": failed,
                    "dropped": dropped,
                    "trajectories": trajectories,
                },
            )
        )

    def list(
        self,
        *,
        tenant: str = "",
        state: Sequence[str] = (),
        page_size: int | None = None,
        page_token: str = "",
    ) -> JobPage:
        """List jobs, newest first, optionally of one tenant or in some states."""
        return self.send(
            RestCall(
                "GET",
                "/v1/jobs",
                JobPage,
                params={
                    "tenant": tenant,
                    "state": state,
                    "page_size": page_size,
                    "page_token": page_token,
                },
            )
        )

    def list_metrics(
        self, job_id: str, *, after: int | None = None, page_size: int | None = None
    ) -> MetricPage:
        """List metric rows, in order."""
        return self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/metrics",
                MetricPage,
                params={"after": after, "page_size": page_size},
            )
        )

    def list_tenants(self, *, tenant: str = "") -> TenantPage:
        """Quotas and usage by tenant; a tenant's token sees only that tenant."""
        return self.send(RestCall("GET", "/v1/tenants", TenantPage, params={"tenant": tenant}))

    def list_tokens(self, *, tenant: str = "") -> TokenPage:
        """List tokens without their secrets, oldest first; revoked ones are kept for a month."""
        return self.send(RestCall("GET", "/v1/tokens", TokenPage, params={"tenant": tenant}))

    def list_trajectories(
        self, job_id: str, *, page_size: int | None = None, page_token: str = "", purpose: str = ""
    ) -> TrajectoryPage:
        """List trajectories with tokens, spans, text and scores, newest first."""
        return self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/trajectories",
                TrajectoryPage,
                params={"page_size": page_size, "page_token": page_token, "purpose": purpose},
            )
        )

    def list_weights(self, job_id: str) -> WeightsView:
        """List versions of the weights, which workers hold them, and their sources."""
        return self.send(RestCall("GET", f"/v1/jobs/{job_id}/weights", WeightsView))

    def pause(self, job_id: str, *, reason: str = "") -> JobView:
        """Pause a job: it frees its workers, and keeps its place in the data."""
        return self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/pause", JobView, params={"reason": reason})
        )

    def resume(self, job_id: str, *, reason: str = "") -> JobView:
        """Queue a paused job again; it continues from its newest checkpoint."""
        return self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/resume", JobView, params={"reason": reason})
        )

    def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token."""
        return self.send(RestCall("DELETE", f"/v1/tokens/{token_id}", TokenView))

    def set_quota(self, tenant: str, *, quota: Quota | None = None) -> TenantView:
        """Replace the quota of a tenant, or reset it to the default. Running jobs continue."""
        if quota is None:
            return self.send(RestCall("DELETE", f"/v1/tenants/{tenant}/quota", TenantView))
        return self.send(RestCall("PUT", f"/v1/tenants/{tenant}/quota", TenantView, body=quota))

    def verify(self, job_id: str) -> VerificationView:
        """Verify the ledger of a job now."""
        return self.send(RestCall("GET", f"/v1/jobs/{job_id}/verify", VerificationView))


class AsyncOperations:
    """Calls of `AsyncClient`."""

    async def send(self, request: RestCall[View]) -> View:
        """Send one call."""
        raise NotImplementedError

    async def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Cancel a job; its record is kept."""
        return await self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/cancel", JobView, params={"reason": reason})
        )

    async def create_token(
        self,
        name: str,
        *,
        tenant: str = "",
        role: str = "",
        expires_in_s: float | None = None,
        no_code: bool | None = None,
    ) -> TokenMade:
        """Create a token; only this reply contains it."""
        return await self.send(
            RestCall(
                "POST",
                "/v1/tokens",
                TokenMade,
                body={
                    "name": name,
                    "tenant": tenant,
                    "role": role,
                    "expires_in_s": expires_in_s,
                    "no_code": no_code,
                },
            )
        )

    async def delete(self, job_id: str, *, force: bool | None = None) -> JobDeletion:
        """Delete a job with its checkpoints and files; audit log and usage are kept."""
        return await self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/delete", JobDeletion, params={"force": force})
        )

    async def get_activity(self, *, tenant: str = "") -> ActivityView:
        """What jobs and processes are doing and waiting for, as cumulative seconds."""
        return await self.send(
            RestCall("GET", "/v1/activity", ActivityView, params={"tenant": tenant})
        )

    async def get(self, job_id: str) -> JobView:
        """Get a job."""
        return await self.send(RestCall("GET", f"/v1/jobs/{job_id}", JobView))

    async def get_model_file(self, job_id: str, name: str) -> ModelFile:
        """Get a small file of a job's model, such as `tokenizer.json`."""
        return await self.send(RestCall("GET", f"/v1/jobs/{job_id}/model/{name}", ModelFile))

    async def import_episodes(self, job_id: str, *, lines: str = "") -> ImportView:
        """Store trajectories that were collected elsewhere in the replay of a job."""
        return await self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/replay", ImportView, body={"lines": lines})
        )

    async def list_audit(
        self, *, before: str = "", page_size: int | None = None, tenant: str = "", action: str = ""
    ) -> AuditLogPage:
        """List audit entries, newest first."""
        return await self.send(
            RestCall(
                "GET",
                "/v1/audit-log",
                AuditLogPage,
                params={
                    "before": before,
                    "page_size": page_size,
                    "tenant": tenant,
                    "action": action,
                },
            )
        )

    async def list_episodes(
        self,
        job_id: str,
        *,
        page_size: int | None = None,
        page_token: str = "",
        purpose: str = "",
        group_id: str = "",
        task_id: str = "",
        reward: str = "",
        step: str = "",
        age: str = "",
        status: str = "",
        failed: bool | None = None,
        dropped: bool | None = None,
        trajectories: bool | None = None,
    ) -> EpisodePage:
        """List stored episodes by reward, step, age, task, group or failure, newest first."""
        return await self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/episodes",
                EpisodePage,
                params={
                    "page_size": page_size,
                    "page_token": page_token,
                    "purpose": purpose,
                    "group_id": group_id,
                    "task_id": task_id,
                    "reward": reward,
                    "step": step,
                    "age": age,
                    "status": status,
                    "failed": failed,
                    "dropped": dropped,
                    "trajectories": trajectories,
                },
            )
        )

    async def list(
        self,
        *,
        tenant: str = "",
        state: Sequence[str] = (),
        page_size: int | None = None,
        page_token: str = "",
    ) -> JobPage:
        """List jobs, newest first, optionally of one tenant or in some states."""
        return await self.send(
            RestCall(
                "GET",
                "/v1/jobs",
                JobPage,
                params={
                    "tenant": tenant,
                    "state": state,
                    "page_size": page_size,
                    "page_token": page_token,
                },
            )
        )

    async def list_metrics(
        self, job_id: str, *, after: int | None = None, page_size: int | None = None
    ) -> MetricPage:
        """List metric rows, in order."""
        return await self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/metrics",
                MetricPage,
                params={"after": after, "page_size": page_size},
            )
        )

    async def list_tenants(self, *, tenant: str = "") -> TenantPage:
        """Quotas and usage by tenant; a tenant's token sees only that tenant."""
        return await self.send(
            RestCall("GET", "/v1/tenants", TenantPage, params={"tenant": tenant})
        )

    async def list_tokens(self, *, tenant: str = "") -> TokenPage:
        """List tokens without their secrets, oldest first; revoked ones are kept for a month."""
        return await self.send(RestCall("GET", "/v1/tokens", TokenPage, params={"tenant": tenant}))

    async def list_trajectories(
        self, job_id: str, *, page_size: int | None = None, page_token: str = "", purpose: str = ""
    ) -> TrajectoryPage:
        """List trajectories with tokens, spans, text and scores, newest first."""
        return await self.send(
            RestCall(
                "GET",
                f"/v1/jobs/{job_id}/trajectories",
                TrajectoryPage,
                params={"page_size": page_size, "page_token": page_token, "purpose": purpose},
            )
        )

    async def list_weights(self, job_id: str) -> WeightsView:
        """List versions of the weights, which workers hold them, and their sources."""
        return await self.send(RestCall("GET", f"/v1/jobs/{job_id}/weights", WeightsView))

    async def pause(self, job_id: str, *, reason: str = "") -> JobView:
        """Pause a job: it frees its workers, and keeps its place in the data."""
        return await self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/pause", JobView, params={"reason": reason})
        )

    async def resume(self, job_id: str, *, reason: str = "") -> JobView:
        """Queue a paused job again; it continues from its newest checkpoint."""
        return await self.send(
            RestCall("POST", f"/v1/jobs/{job_id}/resume", JobView, params={"reason": reason})
        )

    async def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token."""
        return await self.send(RestCall("DELETE", f"/v1/tokens/{token_id}", TokenView))

    async def set_quota(self, tenant: str, *, quota: Quota | None = None) -> TenantView:
        """Replace the quota of a tenant, or reset it to the default. Running jobs continue."""
        if quota is None:
            return await self.send(RestCall("DELETE", f"/v1/tenants/{tenant}/quota", TenantView))
        return await self.send(
            RestCall("PUT", f"/v1/tenants/{tenant}/quota", TenantView, body=quota)
        )

    async def verify(self, job_id: str) -> VerificationView:
        """Verify the ledger of a job now."""
        return await self.send(RestCall("GET", f"/v1/jobs/{job_id}/verify", VerificationView))

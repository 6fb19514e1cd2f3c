{{/* At most 38 characters: CronJob names are limited to 52, and the longest suffix has 13. */}}
{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 38 | trimSuffix "-" -}}
{{- else if contains "paceline" .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-paceline" .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Immutable labels, for selectors. Takes {root, component}. */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Name, namespace and labels of an object. Takes {root, component} and optionally `name`. */}}
{{- define "paceline.metadata" -}}
name: {{ .name | default (printf "%s-%s" (include "paceline.fullname" .root) .component) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
{{- end }}

{{/*
Fixed properties of each component: ports other than 8400 (grpc) and 8401 (metrics), ports exposed by
its Service, secret settings files it reads, and its access to the data volume.
*/}}
{{- define "paceline.parts" -}}
gateway: {ports: {http: 8300}, serves: [http, grpc], secrets: [token], data: read}
controller: {ports: {}, serves: [], secrets: [controller], data: none}
experience: {ports: {}, serves: [grpc], secrets: [store], data: write}
environment: {ports: {}, serves: [], secrets: [], data: none}
reward: {ports: {}, serves: [], secrets: [], data: none}
trainer: {ports: {weights: 8402, torchrun: 8403}, serves: [], secrets: [], data: write}
rollout: {ports: {weights: 8402}, serves: [], secrets: [], data: none}
{{- if (.root | default .).Values.services.tracking.replicas }}
tracking: {ports: {}, serves: [], secrets: [], data: write}
{{- end }}
{{- end }}

{{- define "paceline.part" -}}
{{- $part := index (include "paceline.parts" . | fromYaml) .component -}}
{{- toYaml (set $part "ports" (merge (dict "grpc" 8400 "metrics" 8401) $part.ports)) -}}
{{- end }}

{{/* Maps merged key by key, later ones first, as YAML. Takes a list of maps. */}}
{{- define "paceline.overlaid" -}}
{{- $out := dict -}}
{{- range $layer := . -}}
{{- range $key, $value := $layer -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $out $key $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end }}

{{/*
Passes a YAML list through, but fails if two items have the same name, which the API server would
report less clearly. Takes (list where key list).
*/}}
{{- define "paceline.unique" -}}
{{- $seen := dict -}}
{{- $where := index . 0 -}}
{{- $key := index . 1 -}}
{{- range fromYamlArray (index . 2) -}}
{{- $name := get . $key | toString -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "%s: %s %q is defined twice; some names are reserved by the chart" $where $key $name) -}}
{{- end -}}
{{- $_ := set $seen $name true -}}
{{- end -}}
{{- index . 2 -}}
{{- end }}

{{/* Full name of an image. Takes {root, component, workload}. */}}
{{- define "paceline.image" -}}
{{- $own := .workload.image | default dict -}}
{{- $all := .root.Values.image -}}
{{- $repository := $own.repository | default (printf "%s-%s" $all.repository .component) -}}
{{- if $all.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" $all.registry) $repository }}{{ end -}}
{{- if $own.digest -}}
{{ $repository }}@{{ $own.digest }}
{{- else -}}
{{ $repository }}:{{ $own.tag | default $all.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Pools of rollout workers; null removes a default pool. */}}
{{- define "paceline.pools" -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.rollout.pools -}}
{{- if not (kindIs "invalid" $pool) }}{{ $_ := set $pools $name $pool }}{{ end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end }}

{{/* Checks that the schema cannot express. */}}
{{- define "paceline.check" -}}
{{- $store := .Values.store -}}
{{- if (.Values.defaults.image | default dict).digest -}}
{{- fail "defaults.image.digest: one digest cannot stand behind several images; set image.digest of each service, of trainer, of the pools, of store.embedded and of certificates.pod" -}}
{{- end -}}
{{- if and $store.url $store.existingSecret -}}
{{- fail "store: url and existingSecret are both set; choose one" -}}
{{- end -}}
{{- if regexMatch "://[^/?#]*:[^/?#]*@|[?&]password=" $store.url -}}
{{- fail "store.url: contains a password, which `helm get values` would reveal; put the URL into a Secret and name it in store.existingSecret" -}}
{{- end -}}
{{- if not (or $store.embedded.enabled $store.url $store.existingSecret) -}}
{{- fail "store: there is none; set store.url or store.existingSecret, or store.embedded.enabled: true" -}}
{{- end -}}
{{- if not (include "paceline.pools" . | fromYaml) -}}
{{- fail "rollout.pools: is empty; at least one pool is needed" -}}
{{- end -}}
{{- range $name, $service := .Values.services -}}
{{- if and (eq $service.scaling "hpa") (gt (int $service.hpa.min) (int $service.hpa.max)) -}}
{{- fail (printf "services.%s.hpa: min %d is above max %d" $name (int $service.hpa.min) (int $service.hpa.max)) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "environment" "reward" -}}
{{- $service := index $.Values.services $name -}}
{{- if and (eq $service.scaling "controller") (gt (int $service.replicas) (int $service.maxReplicas)) -}}
{{- fail (printf "services.%s: replicas %d is above maxReplicas %d" $name (int $service.replicas) (int $service.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if lt (int .Values.certificates.authorityDays) (mul 2 .Values.certificates.days) -}}
{{- fail (printf "certificates.authorityDays: %d is less than twice certificates.days, %d" (int .Values.certificates.authorityDays) (int .Values.certificates.days)) -}}
{{- end -}}
{{- if and (not .Values.storage.volume.enabled) (not .Values.storage.url) (not .Values.trainer.extraVolumes) -}}
{{- fail "storage: checkpoints would be lost with the trainer's pod; set storage.url or storage.volume.enabled: true" -}}
{{- end -}}
{{- end }}

{{- define "paceline.store.embedded" -}}
{{- $store := .Values.store -}}
{{- if and $store.embedded.enabled (not $store.url) (not $store.existingSecret) }}true{{ end -}}
{{- end }}

{{/* The existing Secret, if one is named. */}}
{{- define "paceline.store.ready" -}}
{{- if include "paceline.store.embedded" . -}}
{{- .Values.store.embedded.existingSecret -}}
{{- else -}}
{{- .Values.store.existingSecret -}}
{{- end -}}
{{- end }}

{{- define "paceline.store.secret" -}}
{{- include "paceline.store.ready" . | default (printf "%s-store" (include "paceline.fullname" .)) -}}
{{- end }}

{{- define "paceline.token.secret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "paceline.fullname" .)) -}}
{{- end }}

{{/* The controller reads a separate key: it has fewer rights than the bootstrap token. */}}
{{- define "paceline.controller.secret" -}}
{{- include "paceline.token.secret" . -}}
{{- end }}

{{- define "paceline.keys.secret" -}}
{{- .Values.serviceKeys.existingSecret | default (printf "%s-keys" (include "paceline.fullname" .)) -}}
{{- end }}

{{- define "paceline.data.claim" -}}
{{- .Values.storage.volume.existingClaim | default (printf "%s-data" (include "paceline.fullname" .)) -}}
{{- end }}

{{/* DNS names in the certificate of a component: the shared name, that of its kind, that of its Service. */}}
{{- define "paceline.dnsNames" -}}
{{- $service := printf "%s-%s" (include "paceline.fullname" .root) .component -}}
- paceline.internal
- {{ .component }}.paceline.internal
{{- if (include "paceline.part" . | fromYaml).serves }}
- {{ $service }}
- {{ $service }}.{{ .root.Release.Namespace }}
- {{ $service }}.{{ .root.Release.Namespace }}.svc
- {{ $service }}.{{ .root.Release.Namespace }}.svc.cluster.local
{{- end }}
{{- if eq .component "gateway" }}
{{- range .root.Values.certificates.gatewayNames }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Pod Security Standard `restricted`, for a pod and for a container. */}}
{{- define "paceline.podSecurity" -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- $value := index $.Values.podSecurity $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }}: {{ int64 $value }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

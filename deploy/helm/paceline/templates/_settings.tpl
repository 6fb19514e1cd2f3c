{{/* Settings file of a component, as YAML. Takes {root, component, workload}. */}}
{{- define "paceline.settings" -}}
{{- $root := .root -}}
{{- $settings := include "paceline.settings.generated" . | fromYaml -}}
{{- $_ := set $settings "options" (include (printf "paceline.options.%s" .component) $root | fromYaml) -}}
{{- toYaml (mergeOverwrite $settings (deepCopy (.workload.settings | default dict))) -}}
{{- end }}

{{/* Settings files of a pod; in reverse order of names, each overrides the previous ones. Takes {root, component} and optionally `pool`. */}}
{{- define "paceline.settings.files" -}}
{{- $common := include "paceline.workload" (dict "root" .root "component" .component) | fromYaml -}}
settings.yaml: {{ include "paceline.settings" (dict "root" .root "component" .component "workload" $common) | quote }}
{{- if .pool }}
{{- with (index .root.Values.rollout.pools .pool).settings }}
pool-{{ $.pool }}.yaml: {{ toYaml . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.settings.generated" -}}
kind: {{ .component }}
worker_id: {{ .component }}
host: {{ ternary "::" "0.0.0.0" .root.Values.ipv6 | quote }}
port: 8400
metrics_port: 8401
run_dir: /var/lib/paceline
grace_s: {{ .workload.graceSeconds }}
{{- with .root.Values.limits }}
limits: {{ toJson . }}
{{- end }}
{{- if has .component (list "experience" "gateway" "reward" "trainer") }}
plugins: {{ toJson .root.Values.plugins }}
{{- end }}
{{- if has .component (list "experience" "environment" "reward") }}
packages: {{ toJson .root.Values.packages }}
{{- end }}
{{- if has .component (list "environment" "gateway" "tracking") }}
tokenizers: {{ toJson .root.Values.tokenizers }}
{{- end }}
{{- if has .component (list "gateway" "trainer") }}
{{- with .root.Values.models }}
models: {{ toJson . }}
{{- end }}
{{- end }}
{{- if ne .component "experience" }}
experience: {{ include "paceline.fullname" .root }}-experience:8400
{{- end }}
{{- if has .component (list "trainer" "rollout") }}
# A Secret of the job, which the controller mounts.
credential: /etc/paceline/credential/credential
{{- end }}
{{- if and (has .component (list "experience" "trainer")) .root.Values.storage.url }}
storage: {{ .root.Values.storage.url | quote }}
{{- end }}
{{- if include "paceline.traced" . }}
{{- with .root.Values.tracing }}
tracing:
  endpoint: {{ .endpoint | quote }}
  sample: {{ .sample }}
  {{- if .headersSecret }}
  headers_file: /etc/paceline/secrets/tracing-headers/headers
  {{- end }}
  {{- if .authoritySecret }}
  authority: /etc/paceline/secrets/tracing-authority/ca.crt
  {{- end }}
{{- end }}
{{- end }}
{{- if ne .root.Values.certificates.issuer "none" }}
tls:
  certificate: /etc/paceline/tls/tls.crt
  key: /etc/paceline/tls/tls.key
  authority: /etc/paceline/tls/ca.crt
  peer_name: paceline.internal
  require_client: {{ ne .component "gateway" }}
  reload_within_s: {{ .root.Values.certificates.reloadWithinSeconds }}
{{- else }}
service_keys: /etc/paceline/keys/keys.json
{{- end }}
{{- end }}

{{/* Not empty for components that export traces. Takes {root, component}. */}}
{{- define "paceline.traced" -}}
{{- if and .root.Values.tracing.endpoint (has .component (list "experience" "environment" "reward" "rollout" "trainer")) }}yes{{ end }}
{{- end }}

{{- define "paceline.options.gateway" -}}
http_port: 8300
dtype: {{ include "paceline.dtype" . }}
endpoints: {{ keys (dig "settings" "options" "endpoints" dict .Values.services.environment) | sortAlpha | toJson }}
{{- end }}

{{/* What `dtype: auto` of a job means: bfloat16 if trainers have a device (`nvidia.com/gpu`, or a claim). */}}
{{- define "paceline.dtype" -}}
{{- $dtype := "float32" -}}
{{- range $name, $_ := dig "resources" "limits" dict .Values.trainer -}}
{{- if contains "/" $name }}{{ $dtype = "bfloat16" }}{{ end -}}
{{- end -}}
{{- with .Values.trainer.resourceClaims }}{{ $dtype = "bfloat16" }}{{ end -}}
{{- $dtype -}}
{{- end }}

{{- define "paceline.options.experience" -}}
{}
{{- end }}

{{- define "paceline.options.environment" -}}
{}
{{- end }}

{{- define "paceline.options.reward" -}}
{}
{{- end }}

{{- define "paceline.options.tracking" -}}
{}
{{- end }}

{{- define "paceline.options.rollout" -}}
weights_port: 8402
{{- with .Values.rollout.weightsMbitPerSecond }}
weights_mbit_per_s: {{ . }}
{{- end }}
{{- end }}

{{- define "paceline.options.trainer" -}}
weights_port: 8402
{{- with .Values.trainer.weightsMbitPerSecond }}
weights_mbit_per_s: {{ . }}
{{- end }}
{{- end }}

{{/* Scaling options: shared pools that the controller scales, and the overrides in the values. */}}
{{- define "paceline.scaling" -}}
{{- $scaling := dict -}}
{{- range $kind := list "environment" "reward" -}}
{{- $service := index $.Values.services $kind -}}
{{- if eq $service.scaling "controller" -}}
{{- $_ := set $scaling $kind (dict "max_replicas" $service.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $scaling (deepCopy .Values.controller.scaling)) -}}
{{- end }}

{{- define "paceline.options.controller" -}}
{{- $fullname := include "paceline.fullname" . -}}
runtime: kubernetes
environment_replicas: {{ .Values.services.environment.replicas }}
reward_replicas: {{ .Values.services.reward.replicas }}
scaling:
  {{- include "paceline.scaling" . | nindent 2 }}
pools:
  {{- range $name, $pool := include "paceline.pools" . | fromYaml }}
  {{ $name }}:
    cost: {{ $pool.cost | default 1.0 }}
    speed: {{ $pool.speed | default 1.0 }}
    max_replicas: {{ dig "maxReplicas" 64 $pool }}
    min_replicas: {{ dig "minReplicas" 0 $pool }}
    spot: {{ $pool.spot | default false }}
  {{- end }}
kubernetes:
  release: {{ .Release.Name }}
  owner: {{ $fullname }}-controller
  lease: {{ $fullname }}-controller
  templates: /etc/paceline/templates
  gateway: {{ $fullname }}-gateway:8400
  ranks_per_pod: {{ .Values.trainer.ranksPerPod }}
  {{- with .Values.controller.accelerators }}
  accelerators: {{ toJson . }}
  {{- end }}
  kueue: {{ toJson .Values.controller.kueue }}
  jobset: {{ .Values.controller.jobset }}
  network_policies: {{ .Values.networkPolicy.enabled }}
  training_jobs: {{ .Values.controller.trainingJobs }}
  {{- $shared := dict }}
  {{- range $kind := list "environment" "reward" }}
  {{- if eq (index $.Values.services $kind).scaling "controller" }}
  {{- $_ := set $shared $kind (printf "%s-%s" $fullname $kind) }}
  {{- end }}
  {{- end }}
  pools: {{ toJson $shared }}
{{- end }}

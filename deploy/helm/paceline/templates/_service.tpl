{{/* All objects of one entry of `services`. Takes {root, component, workload}. */}}
{{- define "paceline.service" -}}
{{- $workload := .workload -}}
{{- $part := include "paceline.part" . | fromYaml -}}
{{ include "paceline.serviceAccount" . }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
  {{- $replicas := include "paceline.replicas" . }}
  {{- if $replicas }}
  annotations:
    paceline.dev/replicas: {{ ternary "fixed" "kept" (eq $workload.scaling "fixed") }}
  {{- end }}
spec:
  {{- with $replicas }}
  replicas: {{ . }}
  {{- end }}
  revisionHistoryLimit: 5
  {{- /* With `type: Recreate` the default rollingUpdate bounds would remain. */}}
  strategy:
    {{- toYaml (eq $workload.strategy.type "Recreate" | ternary (dict "type" "Recreate") $workload.strategy) | nindent 4 }}
  selector:
    matchLabels:
      {{- include "paceline.selector" . | nindent 6 }}
  template:
    {{- include "paceline.pod" . | nindent 4 }}
{{- if $part.serves }}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
  {{- with dig "service" "annotations" dict $workload }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ dig "service" "type" "ClusterIP" $workload }}
  selector:
    {{- include "paceline.selector" . | nindent 4 }}
  ports:
    {{- range $part.serves }}
    - {name: {{ . }}, port: {{ index $part.ports . }}, targetPort: {{ . }}}
    {{- end }}
{{- end }}
{{- include "paceline.disruption" . }}
{{- if eq $workload.scaling "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "paceline.fullname" .root }}-{{ .component }}}
  minReplicas: {{ $workload.hpa.min }}
  maxReplicas: {{ $workload.hpa.max }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ $workload.hpa.cpuPercent }}}}
{{- end }}
{{- end }}

{{- define "paceline.serviceAccount" -}}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "paceline.metadata" . | nindent 2 }}
  {{- with .workload.serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* Takes {root, component, workload} and optionally `pool`. */}}
{{- define "paceline.disruption" -}}
{{- with .workload.disruption }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- if $.pool }}
  {{- include "paceline.metadata" (merge (dict "name" (printf "%s-rollout-%s" (include "paceline.fullname" $.root) $.pool)) $) | nindent 2 }}
  {{- else }}
  {{- include "paceline.metadata" $ | nindent 2 }}
  {{- end }}
spec:
  {{- if hasKey . "minAvailable" }}
  minAvailable: {{ .minAvailable }}
  {{- else }}
  maxUnavailable: {{ .maxUnavailable }}
  {{- end }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "paceline.selector" $ | nindent 6 }}
      {{- with $.pool }}
      paceline.dev/pool: {{ . }}
      {{- end }}
{{- end }}
{{- end }}

{{/*
Replicas set by the release; empty where another component scales them. A release that has once set
the number cannot unset it, since that would mean 1: it repeats the current number.
*/}}
{{- define "paceline.replicas" -}}
{{- if eq .workload.scaling "fixed" -}}
{{- .workload.replicas -}}
{{- else -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace (printf "%s-%s" (include "paceline.fullname" .root) .component) | default dict -}}
{{- if dig "metadata" "annotations" "paceline.dev/replicas" "" $live -}}
{{- int $live.spec.replicas -}}
{{- end -}}
{{- end -}}
{{- end }}

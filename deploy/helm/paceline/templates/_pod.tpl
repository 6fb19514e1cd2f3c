{{/* A workload's values merged over the defaults. Takes {root, component} and optionally `pool`. */}}
{{- define "paceline.workload" -}}
{{- $values := .root.Values -}}
{{- $layers := list $values.defaults -}}
{{- if hasKey $values.services .component -}}
{{- $layers = append $layers (index $values.services .component) -}}
{{- else -}}
{{- $layers = append $layers (index $values .component) -}}
{{- end -}}
{{- with .pool }}{{ $layers = append $layers (index $values.rollout.pools .) }}{{ end -}}
{{- include "paceline.overlaid" $layers -}}
{{- end }}

{{/*
PodTemplateSpec of every service, of trainers and of rollout workers.
Takes {root, component, workload} and optionally `pool`.
*/}}
{{- define "paceline.pod" -}}
{{- $root := .root -}}
{{- $workload := .workload -}}
{{- $part := include "paceline.part" . | fromYaml -}}
metadata:
  annotations:
    checksum/settings: {{ include "paceline.settings.files" . | sha256sum }}
    {{- if eq .component "experience" }}
    checksum/store: {{ $root.Values.store.url | sha256sum }}
    {{- end }}
    {{- if eq .component "controller" }}
    checksum/templates: {{ include "paceline.templates" $root | sha256sum }}
    {{- end }}
    {{- if $root.Values.monitoring.scrapeAnnotations }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $part.ports.metrics | quote }}
    prometheus.io/path: /metrics
    {{- end }}
    {{- with $workload.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    {{- include "paceline.selector" . | nindent 4 }}
    {{- with .pool }}
    paceline.dev/pool: {{ . }}
    {{- end }}
    {{- with $workload.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with include "paceline.placement" . }}{{ . | trim | nindent 2 }}{{ end }}
  serviceAccountName: {{ include "paceline.fullname" $root }}-{{ .component }}
  automountServiceAccountToken: {{ eq .component "controller" }}
  enableServiceLinks: false
  {{- with include "paceline.pullSecrets" $root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- if eq .component "trainer" }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ add $workload.graceSeconds $workload.preStopSeconds 10 }}
  securityContext:
    {{- include "paceline.podSecurity" $root | nindent 4 }}
    seccompProfile:
      {{- toYaml $workload.seccompProfile | nindent 6 }}
  {{- if not (kindIs "invalid" $workload.hostUsers) }}
  hostUsers: {{ $workload.hostUsers }}
  {{- end }}
  containers:
    - name: paceline
      image: {{ include "paceline.image" . }}
      imagePullPolicy: {{ dig "image" "pullPolicy" $root.Values.image.pullPolicy $workload }}
      # On the root file system, which is read-only.
      workingDir: /
      # The controller reads from the status how a worker ended.
      terminationMessagePolicy: FallbackToLogsOnError
      command:
        {{- include "paceline.command" . | nindent 8 }}
      args:
        {{- include "paceline.args" . | nindent 8 }}
      env:
        {{- include "paceline.unique" (list (printf "%s: extraEnv" .component) "name" (include "paceline.env" .)) | nindent 8 }}
      {{- with include "paceline.envFrom" . }}{{ . | trim | nindent 6 }}{{ end }}
      ports:
        {{- range $name := keys $part.ports | sortAlpha }}
        - {name: {{ $name }}, containerPort: {{ index $part.ports $name }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /livez, port: metrics}
        periodSeconds: 2
        failureThreshold: {{ div (add $workload.startupSeconds 1) 2 }}
      livenessProbe:
        httpGet: {path: /livez, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 2
      {{- if gt (int $workload.preStopSeconds) 0 }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $workload.preStopSeconds | quote }}]}
      {{- end }}
      resources:
        {{- toYaml $workload.resources | nindent 8 }}
      securityContext:
        {{- include "paceline.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        {{- include "paceline.unique" (list (printf "%s: extraVolumeMounts" .component) "mountPath" (include "paceline.mounts" .)) | nindent 8 }}
  volumes:
    {{- include "paceline.unique" (list (printf "%s: extraVolumes" .component) "name" (include "paceline.volumes" .)) | nindent 4 }}
{{- end }}

{{/* Scheduling of pods. */}}
{{- define "paceline.placement" -}}
{{- $workload := .workload -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "resourceClaims" }}
{{- with index $workload $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $workload.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{ merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (include "paceline.selector" $ | fromYaml))) | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Environment variables; `extraEnv` may replace the defaults. */}}
{{- define "paceline.env" -}}
{{- $given := dict -}}
{{- range .workload.extraEnv }}{{ $_ := set $given .name true }}{{ end -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- if not (hasKey $given "PYTHONSAFEPATH") }}
# Keeps Python from importing modules from the working directory.
- {name: PYTHONSAFEPATH, value: "1"}
{{- end }}
{{- if not (hasKey $given "HOME") }}
- {name: HOME, value: /tmp}
{{- end }}
{{- if and (eq .component "trainer") (not (hasKey $given "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")) }}
# By default torchrun kills its ranks 30 seconds after SIGTERM.
- {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: {{ add .workload.graceSeconds 5 | quote }}}
{{- end }}
{{- with .workload.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "paceline.envFrom" -}}
{{- $sources := .workload.extraEnvFrom | default list -}}
{{- $secret := .root.Values.storage.credentialsSecret -}}
{{- if and (has .component (list "experience" "trainer")) $secret -}}
{{- $sources = append $sources (dict "secretRef" (dict "name" $secret)) -}}
{{- end -}}
{{- with $sources }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paceline.command" -}}
- python
- -m
{{- if eq .component "trainer" }}
- torch.distributed.run
- --nnodes
- $(NODES)
- --node-rank
- $(NODE_RANK)
- --nproc-per-node
- $(RANKS_PER_NODE)
- --master-addr
- $(MASTER_ADDR)
- --master-port
- "8403"
- --max-restarts
- "0"
- -m
{{- end }}
- paceline_{{ .component }}
{{- end }}

{{/* Values below `options` are parsed as YAML: quotes keep numeric names as strings. */}}
{{- define "paceline.args" -}}
{{- $address := ternary "[$(POD_IP)]:8400" "$(POD_IP):8400" .root.Values.ipv6 -}}
{{- range keys (include "paceline.settings.files" . | fromYaml) | sortAlpha | reverse }}
- /etc/paceline/settings/{{ . }}
{{- end }}
{{- range (include "paceline.part" . | fromYaml).secrets }}
- /etc/paceline/secrets/{{ . }}/{{ . }}.yaml
{{- end }}
- --set
- worker_id=$(POD_NAME)
- --set
- advertise={{ $address }}
{{- if eq .component "controller" }}
- --set
- options.kubernetes.namespace="$(NAMESPACE)"
- --set
- options.kubernetes.identity="$(POD_NAME)"
{{- else if has .component (list "trainer" "rollout") }}
- --set
- job_id=$(JOB_ID)
- --set
- grace_s={{ .workload.graceSeconds }}
{{- end }}
{{- if eq .component "trainer" }}
- --set
- options.incarnation=$(INCARNATION)
{{- end }}
{{- if eq .component "rollout" }}
- --set
- options.pool="$(POOL)"
{{- end }}
{{- end }}

{{- define "paceline.mounts" -}}
{{- $part := include "paceline.part" . | fromYaml -}}
- {name: settings, mountPath: /etc/paceline/settings, readOnly: true}
{{- range $part.secrets }}
- {name: secret-{{ . }}, mountPath: /etc/paceline/secrets/{{ . }}, readOnly: true}
{{- end }}
{{- if ne .root.Values.certificates.issuer "none" }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
{{- else }}
- {name: keys, mountPath: /etc/paceline/keys, readOnly: true}
{{- end }}
{{- if include "paceline.traced" . }}
{{- if .root.Values.tracing.headersSecret }}
- {name: tracing-headers, mountPath: /etc/paceline/secrets/tracing-headers, readOnly: true}
{{- end }}
{{- if .root.Values.tracing.authoritySecret }}
- {name: tracing-authority, mountPath: /etc/paceline/secrets/tracing-authority, readOnly: true}
{{- end }}
{{- end }}
{{- if eq .component "controller" }}
- {name: templates, mountPath: /etc/paceline/templates, readOnly: true}
{{- end }}
- {name: data, mountPath: /var/lib/paceline{{ if and (eq $part.data "read") .root.Values.storage.volume.enabled }}, readOnly: true{{ end }}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- with .workload.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "paceline.volumes" -}}
{{- $fullname := include "paceline.fullname" .root -}}
{{- $part := include "paceline.part" . | fromYaml -}}
- {name: settings, configMap: {name: {{ $fullname }}-{{ .component }}}}
{{- range $secret := $part.secrets }}
- name: secret-{{ $secret }}
  secret:
    secretName: {{ include (printf "paceline.%s.secret" $secret) $.root }}
    items: [{key: {{ $secret }}.yaml, path: {{ $secret }}.yaml}]
{{- end }}
{{- if ne .root.Values.certificates.issuer "none" }}
- {name: tls, secret: {secretName: {{ $fullname }}-tls-{{ .component }}}}
{{- else }}
- name: keys
  secret:
    secretName: {{ include "paceline.keys.secret" .root }}
    items: [{key: {{ .component }}.json, path: keys.json}]
{{- end }}
{{- if include "paceline.traced" . }}
{{- with .root.Values.tracing.headersSecret }}
- {name: tracing-headers, secret: {secretName: {{ . }}, items: [{key: headers, path: headers}]}}
{{- end }}
{{- with .root.Values.tracing.authoritySecret }}
- {name: tracing-authority, secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}}
{{- end }}
{{- end }}
{{- if eq .component "controller" }}
- {name: templates, configMap: {name: {{ $fullname }}-templates}}
{{- end }}
{{- if and (ne $part.data "none") .root.Values.storage.volume.enabled }}
- {name: data, persistentVolumeClaim: {claimName: {{ include "paceline.data.claim" .root }}}}
{{- else }}
- {name: data, emptyDir: {}}
{{- end }}
- {name: tmp, emptyDir: {}}
{{- with .workload.sharedMemory }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- else }}
- {name: shm, emptyDir: {medium: Memory}}
{{- end }}
{{- with .workload.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "trefoil.name" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "release name %s: Services are named after it. Remedy: a letter first, then letters, digits and '-'" (quote .Release.Name)) }}
{{- end }}
{{- if contains "trefoil" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-trefoil" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* (root, part) */}}
{{- define "trefoil.selector" -}}
app.kubernetes.io/name: trefoil
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "trefoil.labels" -}}
{{ include "trefoil.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* What every pod has: restricted Pod Security. */}}
{{- define "trefoil.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName.control }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "trefoil.container" -}}
imagePullPolicy: {{ .Values.imagePullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Port of the metrics page. Restarted where its event loop stands still; not asked before it serves and knows Redis. */}}
{{- define "trefoil.probes" -}}
startupProbe: {httpGet: {path: /healthz, port: {{ . }}}, periodSeconds: 1, failureThreshold: 180}
livenessProbe: {httpGet: {path: /healthz, port: {{ . }}}, periodSeconds: 10, timeoutSeconds: 5}
readinessProbe: {httpGet: {path: /readyz, port: {{ . }}}, periodSeconds: 2, timeoutSeconds: 2}
{{- end }}

{{/* Over zones and machines, where there are several. (root, part) */}}
{{- define "trefoil.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{ include "trefoil.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* A change of settings or of the chart's files replaces the pods that read them. */}}
{{- define "trefoil.checksum" -}}
checksum/config: {{ include (print .Template.BasePath "/config.yaml") . | sha256sum }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "trefoil.environment" -}}
{{- $name := include "trefoil.name" . }}
- {name: TREFOIL_TOKEN_FILE, value: /run/trefoil/token}
- {name: TREFOIL_TLS_CA, value: /run/trefoil/ca.crt}
- {name: TREFOIL_TLS_CERTIFICATE, value: /run/trefoil/tls.crt}
- {name: TREFOIL_TLS_KEY, value: /run/trefoil/tls.key}
- {name: TREFOIL_OVERRIDES, value: /etc/trefoil.d}
- name: TREFOIL_CONTROLLER
  value: {{ range $i := until (int .Values.controller.replicas) }}{{ if $i }},{{ end }}{{ $name }}-controller-{{ $i }}.{{ $name }}-controller:8102{{ end }}
{{- end }}

{{/* Folders that every service of the control plane mounts. */}}
{{- define "trefoil.mounts" -}}
- {name: config, mountPath: /etc/trefoil, readOnly: true}
- {name: settings, mountPath: /etc/trefoil.d, readOnly: true}
- {name: secrets, mountPath: /run/trefoil, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "trefoil.volumes" -}}
{{- $name := include "trefoil.name" . }}
- name: config
  configMap: {name: {{ $name }}, defaultMode: 0555}
- name: settings
  configMap: {name: {{ $name }}-settings}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ $name }}-control-tls}
      - secret:
          name: {{ $name }}
          items: [{key: token, path: token}, {key: redis_url, path: redis_url}]
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- end }}

{{- define "trefoil.models" -}}
{{- with .Values.models.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* Of GPU nodes, which alone may have models in a folder. */}}
{{- define "trefoil.gpuModels" -}}
{{- if and .Values.models.hostPath (not .Values.models.claim) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "trefoil.modelsVolume" -}}
{{- with .Values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Names of nodes: simulated ones, then GPU nodes. A JSON list. */}}
{{- define "trefoil.nodes" -}}
{{- $name := include "trefoil.name" . }}
{{- $nodes := list }}
{{- range $i := until (int .Values.simulated.replicas) }}{{ $nodes = append $nodes (printf "%s-node-%d" $name $i) }}{{ end }}
{{- toJson (concat $nodes .Values.gpu.nodes) }}
{{- end }}

{{/* Whom certificates name: a JSON object of lists, by the stem of the Secret. */}}
{{- define "trefoil.certificates" -}}
{{- $name := include "trefoil.name" . }}
{{- $control := list "localhost" "dispatcher" }}
{{- range $part := list "controller" "carbon-feed" "dispatcher" "redis" }}
{{- $service := printf "%s-%s" $name $part }}
{{- $control = concat $control (list $service (printf "%s.%s.svc.%s" $service $.Release.Namespace $.Values.clusterDomain)) }}
{{- end }}
{{- range $i := until (int .Values.controller.replicas) }}
{{- $control = append $control (printf "%s-controller-%d.%s-controller" $name $i $name) }}
{{- end }}
{{- $made := dict (printf "%s-control-tls" $name) $control (printf "%s-redis-tls" $name) (list (printf "%s-redis" $name) "localhost") }}
{{- range $node := include "trefoil.nodes" . | fromJsonArray }}
{{- $_ := set $made (printf "%s-of-%s-tls" $name $node) (list $node "localhost") }}
{{- $_ := set $made (printf "%s-tritons-of-%s-tls" $name $node) (list (printf "tritons.%s" $node)) }}
{{- end }}
{{- toJson $made }}
{{- end }}

{{/* (root, part): Secrets that `extraSecrets` mounts into it, and their volumes. */}}
{{- define "trefoil.extraMounts" -}}
{{- range $i, $secret := index (index . 0).Values.extraSecrets (index . 1) }}
- {name: extra-{{ $i }}, mountPath: {{ $secret.mountPath | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "trefoil.extraVolumes" -}}
{{- range $i, $secret := index (index . 0).Values.extraSecrets (index . 1) }}
- name: extra-{{ $i }}
  secret: {secretName: {{ $secret.name }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "trefoil.extraEnv" -}}
{{- with index (index . 0).Values.extraEnv (index . 1) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What agents of both kinds have. (root, component, name of a node in the downward API) */}}
{{- define "trefoil.agentEnvironment" -}}
{{- $root := index . 0 }}
{{- include "trefoil.environment" $root }}
- {name: NODE, valueFrom: {fieldRef: {fieldPath: {{ index . 1 }}}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: TREFOIL_POWER_AGENT_NODE, value: $(NODE)}
- {name: TREFOIL_POWER_AGENT_ADVERTISE_HOST, value: $(POD_IP)}
{{- include "trefoil.extraEnv" (list $root "agent") }}
{{- end }}

{{- define "trefoil.agentMounts" -}}
- {name: config, mountPath: /etc/trefoil, readOnly: true}
- {name: settings, mountPath: /etc/trefoil.d, readOnly: true}
- {name: common, mountPath: /run/trefoil-common, readOnly: true}
- {name: nodes, mountPath: /run/trefoil-nodes, readOnly: true}
- {name: secrets, mountPath: /run/trefoil}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- include "trefoil.extraMounts" (list . "agent") }}
{{- include "trefoil.models" . }}
{{- end }}

{{/* (root, names of nodes, size of shared memory). The pairs of all of them: renewed ones come without a restart, and a DaemonSet has one volume. */}}
{{- define "trefoil.agentVolumes" -}}
{{- $root := index . 0 }}
{{- $name := include "trefoil.name" $root }}
- name: config
  configMap: {name: {{ $name }}, defaultMode: 0555}
- name: settings
  configMap: {name: {{ $name }}-settings}
- name: common
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ $name }}-control-tls, items: [{key: ca.crt, path: ca.crt}]}
      - secret:
          name: {{ $name }}
          items: [{key: token, path: token}, {key: redis_url, path: redis_url}, {key: plan.key, path: plan.key}]
- name: nodes
  projected:
    defaultMode: 0440
    sources:
      {{- range $node := index . 1 }}
      - secret:
          name: {{ $name }}-of-{{ $node }}-tls
          items: [{key: tls.crt, path: {{ $node }}/tls.crt}, {key: tls.key, path: {{ $node }}/tls.key}]
      - secret:
          name: {{ $name }}-tritons-of-{{ $node }}-tls
          items: [{key: tls.crt, path: {{ $node }}/tritons.crt}, {key: tls.key, path: {{ $node }}/tritons.key}]
      {{- end }}
- name: secrets
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ index . 2 }}}
{{- include "trefoil.extraVolumes" (list $root "agent") }}
{{- include "trefoil.modelsVolume" $root }}
{{- end }}

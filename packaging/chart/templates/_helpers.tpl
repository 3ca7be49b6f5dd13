{{- define "sluicegate.name" -}}
{{- if contains "sluicegate" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-sluicegate" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "sluicegate.selector" -}}
app.kubernetes.io/name: sluicegate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluicegate.labels" -}}
{{ include "sluicegate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sluicegate.redis.selector" -}}
app.kubernetes.io/name: sluicegate-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluicegate.secret" -}}
{{ .Values.existingSecret | default (include "sluicegate.name" .) }}
{{- end }}

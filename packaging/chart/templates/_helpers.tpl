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

{{- define "sluicegate.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "sluicegate.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* "true" if the gateways need the key of the Secret. */ -}}
{{- define "sluicegate.needsPassword" -}}
{{ if or .Values.redis.enabled .Values.store.password }}true{{ end }}
{{- end }}
{{- define "sluicegate.needsStoreSecret" -}}
{{ if or .Values.redis.enabled (not (hasPrefix "memory:" .Values.store.url)) }}true{{ end }}
{{- end }}

{{- /* Least number of gateways. They count themselves, but one that starts while the store is down knows only this. */ -}}
{{- define "sluicegate.gateways" -}}
{{ if .Values.autoscaling.enabled }}{{ .Values.autoscaling.minReplicas }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}

{{- /* 0 follows the CPU limit. Without it, the gateway would start one worker per CPU of the node. */ -}}
{{- define "sluicegate.workers" -}}
{{- $cpu := dig "requests" "cpu" "" .Values.resources | toString }}
{{- if .Values.workers }}{{ int .Values.workers }}
{{- else if or (dig "limits" "cpu" "" .Values.resources) (not $cpu) }}0
{{- else if hasSuffix "m" $cpu }}{{ divf (trimSuffix "m" $cpu) 1000 | ceil | int }}
{{- else }}{{ ceil $cpu | int }}
{{- end }}
{{- end }}

{{- /* The name of the volume of a TLS Secret, which may be longer than a name of a volume. */ -}}
{{- define "sluicegate.tlsVolume" -}}
tls-{{ . | sha256sum | trunc 16 }}
{{- end }}

{{- /* The names of all TLS Secrets, as the keys of a JSON map. */ -}}
{{- define "sluicegate.tlsSecrets" -}}
{{- $names := dict }}
{{- range .Values.listeners }}{{ range .tlsSecrets }}{{ $_ := set $names . true }}{{ end }}{{ end }}
{{- $names | toJson }}
{{- end }}

{{- /* All tables except [[listener]]: what the chart writes, merged with `settings`, as JSON. */ -}}
{{- define "sluicegate.settings" -}}
{{- $server := dict "accept_grace" (printf "%ds" (int .Values.acceptGraceSeconds)) "drain_timeout" (printf "%ds" (int .Values.drainTimeoutSeconds)) }}
{{- $_ := set $server "workers" (include "sluicegate.workers" . | int64) }}
{{- $admin := dict "address" (printf "%s:9180" .Values.bindAddress) "token" "${SLUICEGATE_ADMIN_TOKEN}" }}
{{- $store := dict "gateway_count" (include "sluicegate.gateways" . | int64) }}
{{- if .Values.redis.enabled }}
{{- $_ := set $store "url" (printf "redis://%s-redis:6379/0" (include "sluicegate.name" .)) }}
{{- else }}
{{- $_ := set $store "url" (required "store.url is required if redis.enabled is false" .Values.store.url) }}
{{- end }}
{{- if include "sluicegate.needsPassword" . }}{{ $_ := set $store "password" "${REDIS_PASSWORD}" }}{{ end }}
{{- if include "sluicegate.needsStoreSecret" . }}{{ $_ := set $store "secret" "${SLUICEGATE_STORE_SECRET}" }}{{ end }}
{{- $settings := .Values.settings }}
{{- if hasKey $settings "listener" }}{{ fail "settings.listener: set `listeners`, so that the Pods and the Service have the ports" }}{{ end }}
{{- if dig "admin" "address" "" $settings }}{{ fail "settings.admin.address: the probes use port 9180; set `bindAddress`" }}{{ end }}
{{- range $key, $value := dict "accept_grace" "acceptGraceSeconds" "drain_timeout" "drainTimeoutSeconds" }}
{{- if dig "server" $key "" $settings }}{{ fail (printf "settings.server.%s: set `%s`, which `terminationGracePeriodSeconds` includes" $key $value) }}{{ end }}
{{- end }}
{{- with regexFind "(?m)^\\s*\\[+\\s*(server|listener|admin|store|client_ip|log|acme)\\s*[].]" .Values.config }}
{{- fail (printf "config: set the keys of %q in `settings` (or `listeners`), because the chart writes this table, or a change needs a restart" (trim .)) }}
{{- end }}
{{- if not (or .Values.config $settings.route $settings.include) }}{{ fail "no routes: set `config` or `settings.route`" }}{{ end }}
{{- $base := dict "server" $server "admin" $admin "store" $store "client_ip" (dict "trusted_proxies" .Values.trustedProxies) }}
{{- mergeOverwrite $base (deepCopy $settings) | toJson }}
{{- end }}

{{- /* The [[listener]] tables, as JSON: a map, because fromJson reads no list. */ -}}
{{- define "sluicegate.listeners" -}}
{{- $tables := list }}
{{- range .Values.listeners }}
{{- $table := dict "name" .name "address" (printf "%s:%d" $.Values.bindAddress (int .port)) }}
{{- with .tlsSecrets }}
{{- $certificates := list }}
{{- range . }}
{{- $folder := printf "/etc/sluicegate-tls/%s" . }}
{{- $certificates = append $certificates (dict "cert" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder)) }}
{{- end }}
{{- $_ := set $table "tls" (dict "certificates" $certificates) }}
{{- end }}
{{- if or (dig "settings" "address" "" .) (dig "settings" "name" "" .) }}{{ fail "listeners: set `name`, `port` and `bindAddress` instead of `settings`" }}{{ end }}
{{- $tables = append $tables (mergeOverwrite $table (deepCopy (.settings | default dict))) }}
{{- end }}
{{- dict "listener" $tables | toJson }}
{{- end }}

{{- /* A checksum of all that a reload does not apply: new values replace the Pods. The number of gateways is not part of it. */ -}}
{{- define "sluicegate.restart" -}}
{{- $settings := include "sluicegate.settings" . | fromJson }}
{{- $addresses := list }}
{{- range .Values.listeners }}{{ $addresses = append $addresses (int .port) }}{{ end }}
{{- $parts := dict "addresses" $addresses "admin" (get $settings "admin") "store" (omit (get $settings "store") "gateway_count") }}
{{- $_ := set $parts "server" (pick (get $settings "server") "workers" "threading") }}
{{- $_ := set $parts "other" (pick $settings "log" "acme") }}
{{- if not .Values.existingSecret }}{{ $_ := set $parts "secrets" .Values.secrets }}{{ end }}
{{- $parts | toJson | sha256sum }}
{{- end }}

{{- /* TOML. Helm's own toToml writes integers as 1.0. A table in a table, or in a list in a table, is an inline table. */ -}}
{{- define "toml.key" -}}
{{ if regexMatch "^[A-Za-z0-9_-]+$" . }}{{ . }}{{ else }}{{ toRawJson . }}{{ end }}
{{- end }}

{{- define "toml.value" -}}
{{- $items := list }}
{{- if kindIs "map" . }}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}{{ $items = append $items (printf "%s = %s" (include "toml.key" $key) (include "toml.value" $value)) }}{{ end }}
{{- end }}{ {{ join ", " $items }} }
{{- else if kindIs "slice" . }}
{{- range . }}{{ $items = append $items (include "toml.value" .) }}{{ end }}[{{ join ", " $items }}]
{{- else if kindIs "string" . }}{{ toRawJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) (float64 .)) }}{{ int64 . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{- define "toml.keys" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{ include "toml.key" $key }} = {{ include "toml.value" $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "toml.document" -}}
{{- $tables := dict }}
{{- range $name, $value := . }}
{{- $isList := and (kindIs "slice" $value) $value }}
{{- if $isList }}{{ range $value }}{{ if not (kindIs "map" .) }}{{ $isList = false }}{{ end }}{{ end }}{{ end }}
{{- if or $isList (kindIs "map" $value) }}{{ $_ := set $tables $name $value }}
{{- else if not (kindIs "invalid" $value) }}
{{ include "toml.key" $name }} = {{ include "toml.value" $value }}
{{- end }}
{{- end }}
{{- range $name, $value := $tables }}
{{- if kindIs "slice" $value }}
{{- range $value }}

[[{{ include "toml.key" $name }}]]
{{- include "toml.keys" . }}
{{- end }}
{{- else }}
{{- $hasTables := gt (len $value) 0 }}
{{- range $value }}{{ if not (kindIs "map" .) }}{{ $hasTables = false }}{{ end }}{{ end }}
{{- if $hasTables }}
{{- range $inner, $table := $value }}

[{{ include "toml.key" $name }}.{{ include "toml.key" $inner }}]
{{- include "toml.keys" $table }}
{{- end }}
{{- else }}

[{{ include "toml.key" $name }}]
{{- include "toml.keys" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

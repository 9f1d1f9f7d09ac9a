{{- define "stepscope.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "stepscope.secret" -}}
{{- .Values.existingSecret | default (include "stepscope.name" .) -}}
{{- end -}}

{{- define "stepscope.claim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-runs" (include "stepscope.name" .)) -}}
{{- end -}}

{{- define "stepscope.selector" -}}
app.kubernetes.io/name: stepscope
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: page
{{- end -}}

{{- define "stepscope.labels" -}}
app.kubernetes.io/name: stepscope
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

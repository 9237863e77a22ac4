{{- /* Name of the release's objects: rljob-operator if the release is called rljob, as in docs/kubernetes.md. */ -}}
{{- define "rljob.name" -}}
{{- printf "%s-operator" (trunc 43 .Release.Name | trimSuffix "-") -}}
{{- end -}}

{{- define "rljob.serviceAccountName" -}}
{{- default (include "rljob.name" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* Name of cluster-scoped objects. It contains the namespace, so that releases in two namespaces do not conflict. */ -}}
{{- define "rljob.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "rljob.name" .) -}}
{{- end -}}

{{- define "rljob.selector" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rljob.labels" -}}
{{ include "rljob.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: rljob
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* The image that the values give for a part; registry and tag are added if it has none: (dict "root" $ "part" "trainer"). */ -}}
{{- define "rljob.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := get $images .part -}}
{{- $first := index (splitList "/" $image) 0 -}}
{{- $hasHost := and (contains "/" $image) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- if and $images.registry (not $hasHost) -}}
{{- $image = printf "%s/%s" (trimSuffix "/" $images.registry) $image -}}
{{- end -}}
{{- $last := last (splitList "/" $image) -}}
{{- if not (or (contains ":" $last) (contains "@" $last)) -}}
{{- $image = printf "%s:%s" $image (default .root.Chart.AppVersion $images.tag) -}}
{{- end -}}
{{- $image -}}
{{- end -}}

{{- /* Settings of the operator, which rljob.operator.config reads. */ -}}
{{- define "rljob.settings" -}}
{{- $images := dict -}}
{{- range $part := list "coordinator" "runner" "trainer" "rollout" "rewards" "environments" -}}
{{- $_ := set $images $part (include "rljob.image" (dict "root" $ "part" $part)) -}}
{{- end -}}
{{- $cluster := dict
  "images" $images
  "imagePullPolicy" .Values.images.pullPolicy
  "imagePullSecrets" .Values.images.pullSecrets
  "domain" .Values.clusterDomain
  "storageClass" .Values.jobs.storage.className
  "storageSize" .Values.jobs.storage.size
  "accessModes" .Values.jobs.storage.accessModes
  "accelerator" .Values.jobs.accelerator
  "requestsPerGpu" .Values.jobs.requestsPerGPU
  "acceleratorProfiles" .Values.acceleratorProfiles
  "user" .Values.podSecurity.user
  "allowFrom" .Values.jobs.allowFrom
  "gang" .Values.jobs.gang
  "gangScheduler" .Values.jobs.gangScheduler -}}
{{- $seconds := int .Values.leaseSeconds -}}
{{- $lease := dict
  "name" (include "rljob.name" .)
  "durationSeconds" $seconds
  "renewSeconds" (div (mul 2 $seconds) 3)
  "retrySeconds" (max 1 (div $seconds 7)) -}}
{{- $settings := dict
  "cluster" $cluster
  "namespaces" .Values.watchNamespaces
  "workers" (int .Values.workers)
  "listen" (printf ":%d" (int .Values.metrics.port))
  "logLevel" .Values.logLevel
  "lease" $lease -}}
{{- if .Values.webhook.enabled -}}
{{- $_ := set $settings "webhook" (dict "listen" (printf ":%d" (int .Values.webhook.port))) -}}
{{- end -}}
{{- toPrettyJson $settings -}}
{{- end -}}

{{- define "rljob.webhookName" -}}
{{- include "rljob.name" . }}-webhook
{{- end -}}

{{- /* Name of the Secret of the webhook's certificate. cert-manager's is another one, which Helm does not own. */ -}}
{{- define "rljob.webhookSecret" -}}
{{- include "rljob.webhookName" . }}{{ if eq .Values.webhook.certificates "certManager" }}-tls{{ end }}
{{- end -}}

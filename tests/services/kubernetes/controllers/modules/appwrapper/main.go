// The AppWrapper controller and its webhooks. Unlike the program that the module ships, it takes its ports and the
// folder of its certificate from flags, so that several of them run on one machine.
package main

import (
	"flag"
	"log"

	appwrapper "github.com/project-codeflare/appwrapper/api/v1beta2"
	"github.com/project-codeflare/appwrapper/pkg/config"
	"github.com/project-codeflare/appwrapper/pkg/controller"
	"k8s.io/apimachinery/pkg/runtime"
	kubernetes "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metrics "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
)

func main() {
	health := flag.String("health", "", "address of /healthz and /readyz")
	port := flag.Int("webhook-port", 0, "port of the webhooks, on 127.0.0.1")
	folder := flag.String("certificates", "", "folder with tls.crt and tls.key of the webhooks")
	flag.Parse() // controller-runtime adds -kubeconfig
	ctrl.SetLogger(zap.New())

	scheme := runtime.NewScheme()
	check(kubernetes.AddToScheme(scheme))
	check(appwrapper.AddToScheme(scheme))
	manager, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                 scheme,
		Metrics:                metrics.Options{BindAddress: "0"},
		HealthProbeBindAddress: *health,
		WebhookServer:          webhook.NewServer(webhook.Options{Host: "127.0.0.1", Port: *port, CertDir: *folder}),
	})
	check(err)

	settings := config.NewAppWrapperConfig()
	context := ctrl.SetupSignalHandler()
	ready := make(chan struct{})
	close(ready) // the certificate is there before the program starts
	check(controller.SetupIndexers(context, manager, settings))
	check(controller.SetupWebhooks(manager, settings))
	check(controller.SetupControllers(manager, settings))
	check(controller.SetupProbeEndpoints(manager, ready))
	check(manager.Start(context))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

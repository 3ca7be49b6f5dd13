// Ask Sluicegate for a decision before a program serves a request: check URL TOKEN CLIENT_IP
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
)

func main() {
	body, _ := json.Marshal(map[string]any{
		"method": "GET", "url": "https://shop.example/orders", "client_ip": os.Args[3],
		"headers": map[string]string{"X-Api-Key": "demo-key"},
	})
	request, _ := http.NewRequest("POST", os.Args[1]+"/v1/check", bytes.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+os.Args[2])
	response, err := http.DefaultClient.Do(request)
	if err != nil || response.StatusCode != 200 {
		log.Fatal(err, response)
	}
	var decision struct {
		Admitted bool
		Status   int
		Headers  map[string]string
	}
	if err := json.NewDecoder(response.Body).Decode(&decision); err != nil {
		log.Fatal(err)
	}
	if decision.Admitted {
		fmt.Println("admitted", decision.Headers["x-user"])
	} else {
		fmt.Println("denied", decision.Status, decision.Headers["retry-after"])
	}
}

// Render a Helm chart like `helm template`: `main CHART VERSION RELEASE VALUES`. VALUES is JSON that overrides values.yaml.
//
// Debian has the template functions that Helm uses (sprig), but not Helm. This program adds the functions of Helm itself.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func read(path string, into any) {
	text, err := os.ReadFile(path)
	check(err)
	check(yaml.Unmarshal(text, into))
}

func merge(values, others map[string]any) {
	for key, value := range others {
		inner, isMap := value.(map[string]any)
		outer, hasMap := values[key].(map[string]any)
		if isMap && hasMap {
			merge(outer, inner)
		} else {
			values[key] = value
		}
	}
}

func main() {
	folder, version, release := os.Args[1], os.Args[2], os.Args[3]
	values, given, chart := map[string]any{}, map[string]any{}, map[string]any{}
	read(filepath.Join(folder, "values.yaml"), &values)
	read(filepath.Join(folder, "Chart.yaml"), &chart)
	check(json.Unmarshal([]byte(os.Args[4]), &given))
	merge(values, given)

	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	// Helm removes these functions, because a chart must not read the environment.
	delete(functions, "env")
	delete(functions, "expandenv")
	functions["include"] = func(name string, data any) (string, error) {
		var out strings.Builder
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["required"] = func(message string, value any) (any, error) {
		if value == nil || value == "" {
			return nil, errors.New(message)
		}
		return value, nil
	}
	functions["toYaml"] = func(value any) (string, error) {
		var out bytes.Buffer
		encoder := yaml.NewEncoder(&out)
		encoder.SetIndent(2)
		err := encoder.Encode(value)
		return strings.TrimSuffix(out.String(), "\n"), err
	}
	all.Funcs(functions)
	files, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	check(err)
	sort.Strings(files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		check(err)
		_, err = all.New(filepath.Base(file)).Parse(string(text))
		check(err)
	}
	data := map[string]any{
		"Values":  values,
		"Release": map[string]any{"Name": release, "Namespace": "default", "Service": "Helm"},
		"Chart":   map[string]any{"Name": chart["name"], "Version": version, "AppVersion": version},
	}
	for _, file := range files {
		name := filepath.Base(file)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var out strings.Builder
		check(all.ExecuteTemplate(&out, name, data))
		if strings.HasSuffix(name, ".yaml") {
			fmt.Printf("---\n%s\n", out.String())
		}
	}
}
